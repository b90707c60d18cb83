"""Make routes and derived classes."""
from timm_ortho.blocks import BlockSpec
from timm_ortho.routing import Route, subclass_of


def route_of(block, sums, **fields):
    """Return the route of a block whose additions are ``sums``, pairs of a stream and a kind."""
    spec = BlockSpec("Block", *zip(*sums, strict=True), **{"mask": "", **fields})
    return Route(block, spec, tuple(spec.sites), spec.method)


def derived(block, sums, **fields):
    route = route_of(block, sums, **fields)
    return subclass_of(block, route.name, route.source, name="Routed", module="tests.somewhere")
