// @ts-check
/** The types of the server's responses. This module contains no code. */

/**
 * @typedef {object} RunLine one run in the list of runs
 * @property {string} run
 * @property {string} name
 * @property {string} folder
 * @property {"train"|"eval"} kind
 * @property {Record<string, string|null>} env
 * @property {number|null} begun seconds since 1970
 * @property {boolean} live
 * @property {number} steps_done
 * @property {number|null} steps
 * @property {number} rollouts
 * @property {number} failed
 * @property {number|null} reward_last
 */

/**
 * @typedef {object} RunDetail
 * @property {Record<string, any>} settings
 * @property {Record<string, any>} versions
 * @property {Record<string, any>|null} summary
 * @property {string[]} phases
 * @property {string[]} envs
 * @property {string[]} stop_reasons
 * @property {string[]} kinds
 * @property {[number, number]|null} steps_range
 * @property {boolean} has_search
 * @typedef {RunLine & RunDetail} Run
 */

/**
 * @typedef {object} MetricsRow
 * @property {number} step
 * @property {number|null} time seconds since the run started
 * @property {boolean} held_out
 * @property {Record<string, number|null>} metrics
 */

/**
 * @typedef {object} MetricGroup
 * @property {string} title
 * @property {string[]} names exact names, or a prefix that ends with "/*"
 * @property {string} unit
 * @property {string} help
 */

/**
 * @typedef {object} State
 * @property {number} rollouts
 * @property {number} lines
 * @property {boolean} live
 * @property {number|null} indexed
 * @property {number} steps_done
 */

/**
 * @typedef {object} RolloutLine one row of the table of rollouts
 * @property {number} number
 * @property {string} phase
 * @property {number} step
 * @property {string} env
 * @property {string} task
 * @property {string} rollout_id
 * @property {number|null} reward
 * @property {string} stop_reason
 * @property {string|null} failure
 * @property {number} turns
 * @property {number} tokens
 * @property {number} seconds
 * @property {number} tool_calls
 * @property {number} tool_errors
 * @property {string[]} suspicious
 * @property {string|null} [snippet]
 * @property {number|null} [advantage]
 */

/**
 * @typedef {object} Block one part of a message
 * @property {"text"|"call"|"result"|"code"|"diff"|"image"|"thinking"} kind
 * @property {string} [text]
 * @property {string} [name]
 * @property {string} [arguments]
 * @property {string} [id]
 * @property {boolean} [is_error]
 * @property {string} [language]
 * @property {[string, string][]} [spans]
 * @property {[string, string][]} [lines]
 * @property {string} [mime]
 * @property {string|null} [data_url]
 *
 * @typedef {{role: string, blocks: Block[]}} Message
 */

/**
 * @typedef {object} Turn
 * @property {number} number
 * @property {number} start
 * @property {number} stop
 * @property {string} finish_reason
 * @property {[number, number][]} versions
 * @property {number} seconds
 * @property {number} env_seconds
 * @property {number} reward
 * @property {number|null} advantage
 * @property {number|null} gap
 * @property {Message} message
 * @property {Message[]} answers
 *
 * @typedef {object} Segment
 * @property {number} index
 * @property {number|null} parent
 * @property {string} kind
 * @property {string} role
 * @property {string} model
 * @property {boolean} trained
 * @property {string|null} branch
 * @property {number} tokens
 * @property {number} sampled
 * @property {any[]} tools
 * @property {Message[]} opening
 * @property {Turn[]} turns
 */

/**
 * @typedef {object} Failure
 * @property {string} type
 * @property {string} message
 * @property {string} traceback
 * @property {string|null} where
 *
 * @typedef {object} Span
 * @property {number} segment
 * @property {number|null} turn
 * @property {string} what open, wait, generate, tool or score
 * @property {number} from_s
 * @property {number} to_s
 *
 * @typedef {object} Rollout
 * @property {number} number
 * @property {string} phase
 * @property {number} step
 * @property {string} env
 * @property {string} rollout_id
 * @property {string} task
 * @property {number|null} reward
 * @property {Record<string, number>} rewards
 * @property {Record<string, number>} role_rewards
 * @property {Record<string, number>} metrics
 * @property {string} stop_reason
 * @property {Failure|null} failure
 * @property {string|null} sandbox
 * @property {Record<string, string>} failed_cases
 * @property {{name: string, why: string}[]} suspicious
 * @property {number|null} logprob_gap
 * @property {Record<string, any>|null} task_fields
 * @property {Segment[]} segments
 * @property {Span[]} timeline
 * @property {boolean} [exact]
 * @property {{previous: number|null, next: number|null, group: number[]}} neighbors
 */

/**
 * @typedef {object} Tokens
 * @property {number} total
 * @property {number} from
 * @property {string[]} texts
 * @property {number[]} ids
 * @property {number[]} sampled
 * @property {(number|null)[]} trained
 * @property {(number|null)[]} logprobs
 * @property {(number|null)[]} ratios
 * @property {(number|null)[]} advantages
 * @property {(number|null)[]} versions
 * @property {(number|null)[]} turns
 * @property {boolean} named
 */

export {};
