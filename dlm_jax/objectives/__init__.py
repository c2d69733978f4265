"""Forward processes, training objectives, losses, and likelihood bounds."""
