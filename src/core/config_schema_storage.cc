// Rows of aio, checkpoint and activation_checkpointing.
#include "core/config_schema.h"

namespace unshard::config {

std::vector<Section> storage_sections() {
  using enum Kind;
  using enum State;
  Section activation = {
      "activation_checkpointing",
      {
          {.name = "partition_activations",
           .initial = "false",
           .state = accepted,
           .note = "over model-parallel ranks, of which there is one"},
          {.name = "cpu_checkpointing", .initial = "false", .note = "deepspeed.checkpointing keeps inputs in host memory"},
          {.name = "contiguous_memory_optimization", .initial = "false", .state = accepted},
          {.name = "number_checkpoints", .kind = integer, .state = accepted, .range = kCount},
          {.name = "synchronize_checkpoint_boundary", .initial = "false", .state = accepted},
          {.name = "profile", .initial = "false", .note = "a line a checkpointed call, with its times"},
      }};
  Section aio = {"aio",
                 {
                     {.name = "block_size", .kind = integer, .initial = "1048576", .state = accepted, .range = kCount},
                     {.name = "queue_depth", .kind = integer, .initial = "8", .state = accepted, .range = kCount},
                     {.name = "intra_op_parallelism", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
                     {.name = "thread_count",
                      .kind = integer,
                      .initial = "1",
                      .state = accepted,
                      .range = kCount,
                      .note = "older name of intra_op_parallelism"},
                     {.name = "single_submit", .initial = "false", .state = accepted},
                     {.name = "overlap_events", .initial = "true", .state = accepted},
                     {.name = "use_gds", .initial = "false", .state = accepted},
                 },
                 {},
                 true};
  Section checkpoint = {
      "checkpoint",
      {
          {.name = "tag_validation",
           .kind = choice,
           .initial = R"("Warn")",
           .accepted = R"(["Ignore", "Warn", "Fail"])",
           .note = "ranks that save under different tags: rank 0's is used, with a warning, or it is an error"},
          {.name = "load_universal",
           .initial = "false",
           .note = "load_checkpoint reads DeepSpeed's universal layout (latest_universal); it is recognised without, too"},
          {.name = "use_node_local_storage",
           .initial = "false",
           .note = "on one host as without; ranks of several hosts need one folder that all see, and refuse it"},
          {.name = "parallel_write", .kind = section},
          {.name = "checkpoint_serialization", .initial = "true", .state = accepted},
          {.name = "writer", .kind = section},
      }};
  Section parallel_write = {"checkpoint.parallel_write",
                            {
                                {.name = "pipeline_stage", .initial = "false", .state = accepted},
                            }};
  Section writer = {"checkpoint.writer",
                    {
                        {.name = "type",
                         .kind = choice,
                         .initial = R"("fast")",
                         .state = accepted,
                         .accepted = R"(["python", "fast"])",
                         .note = "there is one writer: direct writes, two buffers of 8 MiB a rank"},
                        {.name = "io_buffer_size", .kind = integer, .initial = "67108864", .state = accepted, .range = kCount},
                        {.name = "io_buffer_double", .initial = "true", .state = accepted},
                        {.name = "io_multiplier", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
                        {.name = "show_statistics", .initial = "false", .state = accepted},
                        {.name = "data_parallel", .kind = choice, .state = accepted, .accepted = R"(["replica", "socket", "machine"])"},
                        {.name = "decoupled", .initial = "false", .note = "as unshard.checkpoint.async"},
                    }};
  return {activation, aio, checkpoint, parallel_write, writer};
}

}  // namespace unshard::config
