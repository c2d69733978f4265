"""What a compiled program costs, read from the text of its optimised operations."""
