"""The metrics: a figure of a run is declared once, here, and gates, reports, tables, trackers and the terminal read it.

`metric` says what a metric has to know, and finds them by name. The other files have the metrics, by part.
"""
