"""Where things run: workers on many GPUs, seen from one driver as one engine that trains and one that samples."""
