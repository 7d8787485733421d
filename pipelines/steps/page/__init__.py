"""Parts of the page of a pipeline of steps: its funnel, measured numbers, cost, files, and a choice of rows."""
