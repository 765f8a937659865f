"""What stream health looks at: one figure of the stream in each file, and the verdicts on all of them."""
