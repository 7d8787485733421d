"""Tables and lists: one reader of CSV, TSV and JSON rows, and the names of columns and of splits."""
