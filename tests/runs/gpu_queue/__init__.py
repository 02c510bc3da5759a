"""The queue of jobs that ``make gpu`` runs on a GPU that is available for a few minutes only."""
