#pragma once
// Everything a training program needs: `#include <unshard/unshard.h>`.
#include "unshard/comm/communicator.h"       // IWYU pragma: export
#include "unshard/core/config.h"             // IWYU pragma: export
#include "unshard/core/error.h"              // IWYU pragma: export
#include "unshard/engine/engine.h"           // IWYU pragma: export
#include "unshard/engine/launch.h"           // IWYU pragma: export
#include "unshard/engine/torch_optimizer.h"  // IWYU pragma: export
#include "unshard/zero/parameter_store.h"    // IWYU pragma: export
