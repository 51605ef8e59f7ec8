#include "mok/cuda.h"
