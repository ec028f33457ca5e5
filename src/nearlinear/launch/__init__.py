"""Starting the processes of a run and ending them together."""
