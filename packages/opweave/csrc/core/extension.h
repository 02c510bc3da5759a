// The header for users of the kit: registration, views, checks, and the parallel loop. Needs
// neither Python nor torch.
#pragma once

#include "check.h"
#include "cuda.h"
#include "int_list.h"
#include "parallel.h"
#include "registry.h"
#include "rows.h"
#include "view.h"
