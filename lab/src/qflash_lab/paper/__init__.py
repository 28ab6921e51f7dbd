"""Pages: the demo, and the paper's tables beside what was measured."""
