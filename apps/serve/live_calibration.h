/* live_calibration.h - scales fitted to what a server computes while it serves: an observer on the
 * model until enough tokens have passed, then a scale file.
 *
 * Counting begins and ends between steps, on the service's thread; fitting and writing are a
 * thread's of its own, so that serving goes on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LIVE_CALIBRATION_H
#define KV8_LIVE_CALIBRATION_H

#include "cli.h"
#include "server.h"

typedef struct live_calibration live_calibration;

/* Counting begins with the service's first step, or once `warmup` tokens have passed, and ends with
 * the step that brings it to max_tokens. The model is borrowed. Close it after a failure too. */
int live_calibration_open(live_calibration **out, cli_model *model, const char *path,
                          int32_t warmup, int32_t max_tokens);
/* The service's on_event; cookie is a live_calibration. Goes on to server_on_event. */
void live_calibration_on_event(void *cookie, const kv8_event *event);
/* What the server asks it; all 0 of NULL. */
server_calibration live_calibration_serve(live_calibration *live, kv8_service *service);
/* After the service has stopped: what was counted is written. NULL is fine. */
int live_calibration_close(live_calibration *live);

#endif
