"""The PyTorch front end."""

from nearlinear.torch.distribute import distribute
from nearlinear.torch.session import current as session

__all__ = ["distribute", "session"]
