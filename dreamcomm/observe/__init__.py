"""Views of a job: records, the log, the flight recorder, the table of ranks, the trace."""
