"""Options of the command line, in groups that verbs share."""
