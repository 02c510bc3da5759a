// Which device the thread works on.

#pragma once

namespace acme {

int current_device();

// Throws c10::Error if there is no such device.
void set_current_device(int index);

// Returns `index`, or the current device if it is -1. Throws c10::Error if there is no such device.
int checked_device(int index);

}  // namespace acme
