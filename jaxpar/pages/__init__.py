"""HTML pages of a run and of several runs. Each page is one file that needs no other file and no script."""
