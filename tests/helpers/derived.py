"""Make the class of a route."""
from timm_ortho.routing import subclass_of


def derived(route):
    return subclass_of(route.block, route.name, route.source, name="Routed", module="tests.somewhere")
