"""One file for each family of attention modules that `adopt` can change, and how a scale is calibrated."""
