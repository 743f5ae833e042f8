"""A step of the pipeline: how fast the queue of a machine grows, and how uneven the load of a group is.

In the settings of the domain:  pipeline.steps = ["/etc/muster/pipeline_step.py"]
In the file of rules:           {name: growing, scope: node, when: own.queue_growth > 100}
                                {name: uneven, scope: group, when: own.cpu_spread_mean > 60}
"""

import numpy as np

from muster.pipeline import steps

MEMORY = {"queue": np.nan}  # of the report before


def reports(rows, memory):
    queue = steps.metric(rows, "queue")
    growth = queue - memory["queue"]
    memory["queue"] = queue
    return {"queue_growth": growth}


def groups(rows):
    return {"cpu_spread": steps.metric(rows, "cpu_percent_max") - steps.metric(rows, "cpu_percent_min")}
