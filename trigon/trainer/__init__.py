"""The module path of EasyR1's entry point."""
