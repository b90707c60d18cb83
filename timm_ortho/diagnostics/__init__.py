"""What happens in the stream while a model trains."""
from .dynamics import Recorder, SiteDynamics, record, record_dynamics

__all__ = ["Recorder", "SiteDynamics", "record", "record_dynamics"]
