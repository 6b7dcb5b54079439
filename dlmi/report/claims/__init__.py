"""The claims of the DLMI paper, each decided by a rule on what was measured."""
