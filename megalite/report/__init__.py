"""A run as one HTML page, in reading order: ``history`` (what the run wrote), ``series`` (numbers
for drawing), ``html`` (escaping), ``chart``, ``pipeline``, ``layout`` (the figures), ``page``.
No torch but for reading the files.
"""
