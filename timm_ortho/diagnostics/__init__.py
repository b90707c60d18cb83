"""What happens in the stream while a model trains."""
from .dynamics import SiteDynamics, record_dynamics

__all__ = ["SiteDynamics", "record_dynamics"]
