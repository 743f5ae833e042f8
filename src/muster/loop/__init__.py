"""The closed loop's "decide" step, by rules in files.

A response turns an alert of the pipeline into an event (`response_rules` decides, `responder` sends). A
reaction makes resources receivers, and turns an event that a resource's policy accepts into an operation of
the resource (`reaction_rules` decides, `reactions` acts). `placeholders` fills the values of both.

Only clients of the services are used here; `muster.app.components.loop` runs both in a domain.
"""
