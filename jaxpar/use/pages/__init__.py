"""HTML pages of a run and of several runs. Each page is a self-contained file without scripts."""
