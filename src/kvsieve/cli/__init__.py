"""The `kvsieve` command, one file per verb."""
