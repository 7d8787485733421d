"""Files that are whole or absent, JSON that is checked, and the list of what was set aside."""
