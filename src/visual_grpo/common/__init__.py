"""What every package may use: errors, files, the console, the device, images."""
