"""The stream: read it, change it, and run many variants of it at once."""
