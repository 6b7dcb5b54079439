"""What a run stores and shows. Leaving one out never changes a result."""
