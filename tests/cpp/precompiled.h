// Headers that most of the tests include, read once for all. Each test also includes what it needs.
#pragma once

#include <doctest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>
