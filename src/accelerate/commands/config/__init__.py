"""The published module `accelerate.commands.config`."""

from meshwright.commands.config import get_config_parser as get_config_parser, main as main
from meshwright.config.launch.cluster_config import default_config_file as default_config_file
from meshwright.published import publish as _publish

from .config import config_command_parser as config_command_parser
from .config_args import load_config_from_file as load_config_from_file
from .default import default_command_parser as default_command_parser
from .update import update_command_parser as update_command_parser

_publish(__name__)

if __name__ == "__main__":
    main()
