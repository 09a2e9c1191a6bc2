"""`initialize` with DeepSpeed's defaults."""
import unshard
from unshard import parameter_attributes

from deepspeed import comm


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               distributed_port=29500, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None,
               config_params=None):
    """(engine, optimizer, training_dataloader, lr_scheduler); see unshard.initialize."""
    parameter_attributes.install()
    made = unshard.initialize(args=args, model=model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data,
                              lr_scheduler=lr_scheduler, distributed_port=distributed_port, mpu=mpu,
                              dist_init_required=dist_init_required, collate_fn=collate_fn, config=config, mesh_param=mesh_param,
                              config_params=config_params, deepspeed_defaults=True)
    comm.configure(made[0].config)                     # its comms_logger
    return made


def add_config_arguments(parser):
    """Add --deepspeed and --deepspeed_config to an argparse parser (and the old spellings, hidden)."""
    import argparse
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed (a flag for the script itself)")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the DeepSpeed JSON")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
