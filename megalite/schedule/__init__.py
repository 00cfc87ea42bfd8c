"""Pipeline schedules as data, in reading order: ``action`` (what a rank does), ``generators``
(compute only), ``placement`` (what lies where), ``lower`` (adds messages and reductions),
``validate`` (proves a lowered plan), ``simulate`` (times it), ``render`` (text and CSV). No torch.
"""
