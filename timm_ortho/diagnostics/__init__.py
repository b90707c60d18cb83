"""What happens in the stream while a model trains, and what its features are like."""
from . import representation
from .dynamics import Recorder, SiteDynamics, record, record_dynamics
from .row_file import record_as_asked

__all__ = ["Recorder", "SiteDynamics", "record", "record_as_asked", "record_dynamics", "representation"]
