"""Speech by command and by stage: `generate`."""
