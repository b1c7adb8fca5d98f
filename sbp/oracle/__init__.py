"""What is held to be right. Uses none of the subject's code."""
