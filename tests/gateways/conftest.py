"""Fixtures of the services behind the gateways."""

from tests.inform.conftest import start_node as start_node
from tests.manage.conftest import fleet as fleet
from tests.message.conftest import dial as dial
from tests.message.conftest import dispatcher as dispatcher
