"""The run report: one HTML page that holds all of a run and needs nothing but a browser.

read         what a run's folder says, also of a run that goes on or was killed
completions  completions.jsonl as compact columns, thinned out to a limit
settings     the configuration beside its defaults
page         the page: data and assets put together, nothing a model wrote taken for markup
assets/      the page's HTML, CSS and JavaScript, joined into one file when the page is written
"""
