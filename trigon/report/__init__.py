"""What is seen of a run: on the screen, in its folder, and in the trackers that a user chose."""
