"""The embedded demonstration: a tiny model, drawings to read, a supervised warm start, the quickstart."""
