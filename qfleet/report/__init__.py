"""Reports of runs as a web page: one file on disk, or live while runs train."""
