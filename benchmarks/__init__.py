"""Speed and memory, always as ratios against a named rival measured in the same run."""
