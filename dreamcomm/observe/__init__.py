"""What shows people a job: records, the log, the flight recorder, the table of ranks, the trace."""
