"""Reports on runs and evaluations: plots, and one HTML file for a paper or a pull request."""
