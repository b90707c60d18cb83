"""Measure the stream during training."""
from .dynamics import Recorder, SiteDynamics, record, record_dynamics
from .recording_file import record_if_requested

__all__ = ["Recorder", "SiteDynamics", "record", "record_dynamics", "record_if_requested"]
