// What most of the tests include, read once for all. Each includes what it needs itself, too.
#pragma once

#include <doctest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>
