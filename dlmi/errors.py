"""The one exception for mistakes that a user can mend."""


class InputError(ValueError):
    """A user's mistake, told in one line.

    The line names the argument, what was expected, what came and the way out. On the command line
    it is printed without a traceback and the exit code is 2.
    """
