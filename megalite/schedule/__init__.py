"""Pipeline schedules as data, without torch. In reading order: ``action`` (what a rank does),
``classic`` and ``zero_bubble`` (what each rank computes), ``generators`` (all of them by name),
``placement`` (what lies where), ``lower`` (adds messages and reductions), ``validate`` (proves a
lowered plan) with ``peaks`` (what it holds), ``simulate`` (times it) with ``costs`` and
``lost_time``, ``render`` and ``svg`` (text, CSV, picture), ``files`` (reads them back), and
``search`` (the schedule ``auto``) with ``fill`` and ``greedy``.
"""
